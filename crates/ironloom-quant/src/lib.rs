//! ironloom-quant
