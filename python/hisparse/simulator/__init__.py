"""Studies of the hot buffer without a model: traces of selections, made or recorded, under replacement policies."""
