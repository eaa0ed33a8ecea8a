//! Shapes and set-up shared by the benches.
