"""Times, as ratios of two things measured in turn in one run, and what the device of this machine does."""
