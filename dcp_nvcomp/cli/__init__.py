"""The command `dcp-nvcomp`, one file a command."""
