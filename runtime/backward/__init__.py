"""The backward of a training graph, as data; its programs; and the autograd function that calls them."""
