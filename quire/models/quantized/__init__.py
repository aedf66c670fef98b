"""How checkpoints say that their matrices are quantised, a module for each method that writes them."""
