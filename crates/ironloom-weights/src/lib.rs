//! ironloom-weights
