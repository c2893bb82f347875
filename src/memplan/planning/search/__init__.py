"""Budget -> choices; the lower bound."""
