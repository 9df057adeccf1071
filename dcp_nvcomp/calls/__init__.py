"""What the calls that save and load have in common, whichever way the data goes."""
