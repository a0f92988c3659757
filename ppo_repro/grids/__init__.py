"""Run many experiments that answer one question: the grid file, its cells, and the executors that run the cells."""
