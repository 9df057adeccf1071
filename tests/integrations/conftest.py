"""The jobs are programs for torchrun: pytest must not import them to look for doctests."""

collect_ignore_glob = ["jobs/*"]
