//! ironloom-decode
