"""What each module's half precision would do to the loss and its gradient, and a policy chosen by that."""
