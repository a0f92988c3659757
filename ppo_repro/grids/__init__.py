"""Many runs for one question: the grid file, its cells, and the engines that run them."""
