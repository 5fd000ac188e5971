"""What turns a call into a launch plan, without knowing a kernel family or a compiler."""
