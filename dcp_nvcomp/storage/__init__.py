"""Storage: the contract, and one folder for each kind."""
