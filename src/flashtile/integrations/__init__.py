"""flashtile inside other packages. Every module is imported by name, imports its package, and changes nothing until its
function is called."""
