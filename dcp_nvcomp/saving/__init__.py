"""A save: plan -> encode -> stage -> write -> commit."""
