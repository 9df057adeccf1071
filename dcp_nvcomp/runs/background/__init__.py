"""What happens to a run's saves in the background, from the files that the ranks wrote to the removal of old steps."""
