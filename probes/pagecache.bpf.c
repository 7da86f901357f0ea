// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * What enters and leaves the page cache, by file, and which file a thread is
 * asking for. On any file system with a page cache the pages added to a file's
 * mapping are the bytes its storage had to deliver.
 */
#include "shared.bpf.h"

/* Which pages left the cache, a bit each: what comes in again was refaulted. Only
 * the kernel's own shadow entries know more, and no hook shows them. Of more than
 * this many pieces of 2 MiB (64 GiB) the ones evicted first are forgotten. */
#define PIECE_PAGES 512
#define PIECE_WORDS (PIECE_PAGES / 64)
#define PIECES 32768

struct piece_key {
	u64 ino;
	u32 dev;
	u32 piece;
	u32 generation; /* a new file may get the number of one that was deleted */
	u32 pad;
};

struct piece {
	u64 gone[PIECE_WORDS];
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, PIECES);
	__type(key, struct piece_key);
	__type(value, struct piece);
} pieces SEC(".maps");

/* Kswapd has it, and so has a thread that must reclaim before its allocation. */
#define PF_MEMALLOC 0x800

/* Folios are aligned to their size: one fills whole words, or a part of one. */
static __always_inline bool is_part(u64 pages)
{
	return pages < 64;
}

static __always_inline u64 part_of_word(u64 index, u64 pages)
{
	return ((1ULL << (pages & 63)) - 1) << (index & 63);
}

static __always_inline bool is_filled(u32 word, u64 index, u64 pages)
{
	return word - (u32)(index % PIECE_PAGES / 64) < pages / 64;
}

static __always_inline struct piece_key piece_of(struct inode *host, u64 index)
{
	struct piece_key key = {
		.ino = FIELD(host, i_ino),
		.dev = FIELD(host, i_sb, s_dev),
		.piece = index / PIECE_PAGES,
		.generation = FIELD(host, i_generation),
	};

	return key;
}

static __always_inline void note_gone(struct inode *host, u64 index, u64 pages)
{
	struct piece_key key = piece_of(host, index);
	struct piece *p = bpf_map_lookup_elem(&pieces, &key);

	if (!p) {
		struct piece none = {};

		bpf_map_update_elem(&pieces, &key, &none, BPF_NOEXIST);
		p = bpf_map_lookup_elem(&pieces, &key);
		if (!p)
			return;
	}
	if (is_part(pages)) {
		__sync_fetch_and_or(&p->gone[index / 64 % PIECE_WORDS], part_of_word(index, pages));
		return;
	}
	for (u32 word = 0; word < PIECE_WORDS; word++)
		if (is_filled(word, index, pages))
			p->gone[word] = ~0ULL;
}

/* A function that the verifier looks at once, and not at every place. */
__noinline u32 ones_in(u64 word)
{
	return __builtin_popcountll(word);
}

/* How many of these pages were evicted before; they are in the cache again. */
static __always_inline u64 take_back(struct inode *host, u64 index, u64 pages)
{
	struct piece_key key = piece_of(host, index);
	struct piece *p = bpf_map_lookup_elem(&pieces, &key);
	u64 found = 0;

	if (!p)
		return 0;
	if (is_part(pages)) {
		u64 bits = part_of_word(index, pages);

		return ones_in(bits & __sync_fetch_and_and(&p->gone[index / 64 % PIECE_WORDS],
							   ~bits));
	}
	for (u32 word = 0; word < PIECE_WORDS; word++) {
		if (is_filled(word, index, pages)) {
			found += ones_in(p->gone[word]);
			p->gone[word] = 0;
		}
	}
	return found;
}

/* Whether the thread is writing to the file: what it adds then comes from it, not from
 * storage. A page that it takes what it writes from may be of a file as well. */
static __always_inline bool is_written(struct inode *host)
{
	struct task_struct *task = current_task();
	s64 nr = task_syscall(task);
	u32 call = nr >= 0 && nr < 512 ? settings.call_class[nr & 511] : CALL_NONE;

	if (call != CALL_WRITE && call != CALL_WRITEV && call != CALL_PWRITE)
		return false;
	struct pt_regs *regs = task_regs(task);
	struct file *file = fd_file(REGS_ARG0(regs));
	return file && file_cache_inode(file) == host;
}

TRACEPOINT(mm_filemap_add_to_page_cache)
int BPF_PROG(pagecache__add, struct folio *folio)
{
	struct address_space *mapping = folio_mapping(folio);
	struct inode *host = FIELD(mapping, host);
	u64 ino = FIELD(host, i_ino);
	u32 dev = FIELD(host, i_sb, s_dev);
	struct file_slot *f = file_find(dev, ino);
	struct thread_slot *t = current_slot();

	if (!f) {
		/* A file a target pulls in without having opened it before our eyes:
		 * mapped before recording began. */
		u64 size_bytes = FIELD(host, i_size);

		if (!t || size_bytes < settings.min_file_bytes)
			return 0;
		f = file_follow(dev, ino, size_bytes);
		if (!f)
			return 0;
	}
	u64 pages = folio_pages(folio);
	u64 again = f->evicted_pages ? take_back(host, folio_index(folio), pages) : 0;
	f->cached_pages = FIELD(mapping, nrpages);
	if (t && is_written(host))
		return 0;
	if (t) {
		__sync_fetch_and_add(&f->added_pages, pages);
		if (again)
			__sync_fetch_and_add(&f->refaulted_pages, again);
		t->file_ino = ino;
		t->file_dev = dev;
		file_touch(f);
	} else {
		__sync_fetch_and_add(&f->foreign_pages, pages);
	}
	return 0;
}

/* Takes off what the counter has: some of the pages may have come in before the file was
 * followed. Gives the rest. */
static __always_inline u64 take_off(u64 *counter, u64 pages)
{
	u64 have = *counter;
	u64 taken = pages < have ? pages : have;

	__sync_fetch_and_sub(counter, taken);
	return pages - taken;
}

TRACEPOINT(mm_filemap_delete_from_page_cache)
int BPF_PROG(pagecache__delete, struct folio *folio)
{
	struct address_space *mapping = folio_mapping(folio);
	struct inode *host = FIELD(mapping, host);
	struct file_slot *f = file_find(FIELD(host, i_sb, s_dev), FIELD(host, i_ino));

	if (!f)
		return 0;
	u64 pages = folio_pages(folio);
	struct task_struct *task = current_task();
	f->cached_pages = FIELD(mapping, nrpages);
	if (!folio_is_filled(folio)) {
		/* Readahead that a file system broke off (FUSE, when its queue is full):
		 * nothing came from storage for these pages. */
		bool ours = current_slot() != 0;
		u64 rest = take_off(ours ? &f->added_pages : &f->foreign_pages, pages);
		/* Whoever breaks it off may not be who began it. */
		take_off(ours ? &f->foreign_pages : &f->added_pages, rest);
		return 0;
	}
	__sync_fetch_and_add(&f->evicted_pages, pages);
	if (FIELD(task, flags) & PF_MEMALLOC)
		__sync_fetch_and_add(&f->reclaimed_pages, pages);
	note_gone(host, folio_index(folio), pages);
	return 0;
}

/* read(), pread(), splice: one hit a batch of folios. */
TRACEPOINT(mm_filemap_get_pages)
int BPF_PROG(pagecache__get, struct address_space *mapping)
{
	struct thread_slot *t = current_slot();
	struct file_slot *f = t ? file_wanted(t, FIELD(mapping, host)) : 0;

	if (f)
		file_touch(f);
	return 0;
}

/* Before 6.12, a read. */
ON_ENTRY(filemap_read, pagecache__get)
{
	struct thread_slot *t = current_slot();

	if (!t)
		return 0;
	u64 inode = (u64)BPF_CORE_READ((struct kiocb *)first, ki_filp, f_mapping, host);
	struct file_slot *f = file_wanted_at(t, inode);
	if (f)
		file_touch(f);
	return 0;
}
