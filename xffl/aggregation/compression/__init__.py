"""What cells send instead of whole values, and the residuals that they keep."""
