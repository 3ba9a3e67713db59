//! Limits of one archive. They bound the memory and the time that a hostile archive can take.

/// Limits of one archive.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Decompressed bytes of a compressed archive, whatever its size.
    pub expanded: u64,
    /// Decompressed bytes for each byte of a compressed archive, if that is more.
    pub ratio: u64,
    /// Bytes of an index, a manifest or a configuration.
    pub document: u64,
    /// Values in such a document that have a meaning for the agent.
    pub values: usize,
    /// Bytes of texts among these values.
    pub texts: usize,
    /// Entries of a tar archive, of every type.
    pub entries: usize,
    /// Files and links of an archive that are not directories.
    pub files: usize,
    /// Bytes of the names of these files and links, and of the targets of links.
    pub names: usize,
    /// Bytes of memory that they take with all documents, about.
    pub memory: usize,
    /// Blobs.
    pub blobs: usize,
    /// Images.
    pub images: usize,
    /// References from documents to blobs, in all documents, and in all images.
    pub references: usize,
    /// Layers of one image.
    pub layers: usize,
    /// Levels of indexes in an index.
    pub nesting: usize,
    /// Faults that are listed; further ones are counted by none.
    pub faults: usize,
}

/// The limits of the agent.
pub const LIMITS: Limits = Limits {
    expanded: 1 << 30,
    ratio: 200,
    document: 4 << 20,
    values: 50_000,
    texts: 2 << 20,
    entries: 100_000,
    files: 30_000,
    names: 2 << 20,
    memory: 10 << 20,
    blobs: 10_000,
    images: 1000,
    references: 20_000,
    layers: 500,
    nesting: 3,
    faults: 1000,
};
