//! ironloom-tensor
