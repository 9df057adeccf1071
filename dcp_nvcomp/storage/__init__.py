"""Where bytes live: the contract, and one folder for each kind of storage."""
