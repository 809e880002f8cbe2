"""The files that models of Nematus are in: a module for each form, all of them read by ``nematus.load``."""
