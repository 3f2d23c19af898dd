"""Where an error comes from: distribution, place and, by doing single steps wrong on purpose, its likely cause."""
