"""`python -m dcp_nvcomp.cli`: the command without its installed script."""

from dcp_nvcomp.cli.app import main

main()
