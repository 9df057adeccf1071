"""The replicas that training keeps anyway, such as those of HSDP, used as each other's copies."""
