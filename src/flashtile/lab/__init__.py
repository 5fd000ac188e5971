"""The laboratory: what measures, checks and explains the library. The library never imports it."""
