// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * What enters and leaves the page cache, by file, and which file a thread is
 * asking for. On any file system with a page cache the pages added to a file's
 * mapping are the bytes its storage had to deliver.
 */
#include "shared.bpf.h"

SEC("tp_btf/mm_filemap_add_to_page_cache")
int BPF_PROG(pagecache__add, struct folio *folio)
{
	struct inode *host = folio->mapping->host;
	u64 ino = host->i_ino;
	u32 dev = host->i_sb->s_dev;
	struct file_slot *f = file_find(dev, ino);
	struct thread_slot *t = current_slot();

	if (!f) {
		/* A file a target pulls in without having opened it before our eyes:
		 * mapped before recording began, or reached through overlayfs. */
		u64 size_bytes = host->i_size;

		if (!t || size_bytes < settings.min_file_bytes)
			return 0;
		f = file_follow(dev, ino, size_bytes);
		if (!f)
			return 0;
	}
	u64 pages = folio_pages(folio);
	f->cached_pages = folio->mapping->nrpages;
	if (t) {
		__sync_fetch_and_add(&f->added_pages, pages);
		t->file_ino = ino;
		t->file_dev = dev;
		file_touch(f);
	} else {
		__sync_fetch_and_add(&f->foreign_pages, pages);
	}
	return 0;
}

SEC("tp_btf/mm_filemap_delete_from_page_cache")
int BPF_PROG(pagecache__delete, struct folio *folio)
{
	struct address_space *mapping = folio->mapping;
	struct inode *host = mapping->host;
	struct file_slot *f = file_find(host->i_sb->s_dev, host->i_ino);

	if (!f)
		return 0;
	__sync_fetch_and_add(&f->evicted_pages, folio_pages(folio));
	f->cached_pages = mapping->nrpages;
	return 0;
}

/* read(), pread(), splice: one hit a batch of folios. */
SEC("tp_btf/mm_filemap_get_pages")
int BPF_PROG(pagecache__get, struct address_space *mapping)
{
	struct thread_slot *t = current_slot();

	if (!t)
		return 0;
	struct file_slot *f = file_wanted(t, mapping->host);
	if (f)
		file_touch(f);
	return 0;
}
