"""Training jobs, one for each framework: `torchrun ... -m tests.integrations.jobs.NAME DIRECTORY train|resume`."""
