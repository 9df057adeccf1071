"""Where the steps of a run are: a fast tier on each node, copies on its peers, and the durable tier."""
