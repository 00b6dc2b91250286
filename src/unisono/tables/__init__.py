"""Tables of rows on many workers: map and reduce, linear models, boosted trees."""
