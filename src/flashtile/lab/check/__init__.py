"""`flashtile check`: random problems on every backend against fp64, and against each other bit by bit where that is
promised."""
