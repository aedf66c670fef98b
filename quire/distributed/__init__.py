"""How the ranks of one model talk to each other."""
