"""`vitreous serve`: the page and the JSON API behind it."""
