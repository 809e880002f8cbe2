"""The files of Nematus models: one module for each form; ``nematus.load`` reads all of them."""
