"""From write items to encoded blocks."""
