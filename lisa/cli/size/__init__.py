"""`lisa size`: the cluster that a given load needs, from measured costs."""
