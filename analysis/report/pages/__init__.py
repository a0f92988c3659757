"""The pages: of one run of any kind, of two side by side, of a grid."""
