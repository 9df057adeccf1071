"""What people met with this package or with others, and what is right."""
