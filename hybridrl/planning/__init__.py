"""The dry run: memory, switches and seconds of a recipe, from its sizes alone. No torch, no devices."""
