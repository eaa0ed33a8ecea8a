//! Faults that people reported about readers of model files, as cases. Named by project and number.
