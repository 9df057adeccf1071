"""Plans that are kept from save to save."""
