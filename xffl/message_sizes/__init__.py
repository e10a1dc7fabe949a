"""How many bytes the messages of a round take: ranks send as many, and forecasts count with them. Without torch."""
