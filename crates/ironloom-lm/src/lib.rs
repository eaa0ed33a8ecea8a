//! ironloom-lm
