"""`python -m dcp_nvcomp.cli`: the command where no script is installed."""

from dcp_nvcomp.cli.app import main

main()
