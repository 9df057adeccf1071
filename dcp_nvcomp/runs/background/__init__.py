"""What happens to a run's saves behind training, from the files that the ranks wrote to the removal of old steps."""
