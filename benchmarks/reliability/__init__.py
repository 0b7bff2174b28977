"""What happens when something goes wrong, and in a hundred thousand steps."""
