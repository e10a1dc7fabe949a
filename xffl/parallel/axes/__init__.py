"""The axes of a mesh other than data: sequences, layers and matrices that are cut over the ranks of a cell."""
