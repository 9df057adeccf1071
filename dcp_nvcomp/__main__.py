"""`python -m dcp_nvcomp` is the command `dcp-nvcomp`."""

from dcp_nvcomp.cli.app import main

if __name__ == "__main__":
    main()
