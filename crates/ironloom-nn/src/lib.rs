//! ironloom-nn
