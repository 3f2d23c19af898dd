"""The functions of other libraries, with their arguments, layouts and return values, on the operators of this one."""
