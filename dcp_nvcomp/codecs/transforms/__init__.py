"""Array -> bytes codecs: which planes a block has."""
