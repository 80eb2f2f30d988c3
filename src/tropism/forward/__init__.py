"""How a decoder of transformers runs here: its own modules, with faster ways through them."""
