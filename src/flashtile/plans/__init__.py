"""The way from a call to a launch plan, as far as it knows neither a kernel family nor a compiler."""
